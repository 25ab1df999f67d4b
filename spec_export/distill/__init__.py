"""Makes training data by letting the target itself answer prompts (self-distillation)."""
