"""Which tokens go when a budget is exceeded, and what moves then."""
