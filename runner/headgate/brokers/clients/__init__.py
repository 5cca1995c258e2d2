"""Clients of brokers: from stored connections to open ones, from errors to a producer's, from bytes to values."""
