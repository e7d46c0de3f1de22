"""Running a model's own code once per precision, in lock-step, and writing down what each lane held."""
