"""Programs that measure ddpopt beside other ways to train; README.md lists them."""
