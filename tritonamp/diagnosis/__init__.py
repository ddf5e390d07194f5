"""Why a step was skipped."""
