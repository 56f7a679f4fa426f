"""A zoo of small real architectures, as data, for end-to-end tests."""
