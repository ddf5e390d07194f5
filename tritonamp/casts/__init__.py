"""Which dtype: policies applied to models, inputs, operations."""
