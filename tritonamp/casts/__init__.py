"""The dtypes of an enabled model: its tensors, its inputs and outputs, its operations."""
