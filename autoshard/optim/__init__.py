"""Optimizers over sharded parameters: followed, tried, clipped, scaled."""
