"""From hazards to a plan: which nodes stay in FP32, and what that costs."""
