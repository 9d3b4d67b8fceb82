"""What people train, by name: cases of `fuzzing`, each with DDP compiled and eager on two ranks."""
