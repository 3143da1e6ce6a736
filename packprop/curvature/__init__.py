"""Second derivatives: their seed vectors, the routes to compute them, and products with them."""
