"""Second derivatives: what is fed in for them, by which route, and products with them."""
