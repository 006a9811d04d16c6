"""How far one array is from another: metrics, tolerances, statistics."""
