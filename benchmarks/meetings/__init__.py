"""What meetings of many ranks cost: `python -m benchmarks.meetings`."""
