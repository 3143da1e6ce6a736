"""Small models and losses, written as their authors would write them: the material of the cases."""
