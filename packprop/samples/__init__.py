"""Where the samples of a pass are, and whether they stay apart."""
