"""What exporters write, recognised."""
