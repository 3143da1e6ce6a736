"""A folder on the path to names of the older library."""
