"""Where names of the older library are looked for."""
