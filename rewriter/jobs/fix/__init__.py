"""`fix`: rewrites a model for a build in reduced precision, and verifies it."""
