"""Error figures: `pair` computes them, `metrics` names them, `outputs` applies them to a model's outputs."""
