"""The place of the samples of a pass, and checks that they stay apart."""
