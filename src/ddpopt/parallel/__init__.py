"""One process, several devices: what nn.DataParallel does, with replicas that are compiled."""
