"""Tiny random models of transformers types, built from their config classes alone: test data that may name types."""
