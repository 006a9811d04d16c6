"""How a result is shown: `terminal` for people, `json` for programs."""
