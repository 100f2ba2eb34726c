"""Why a step is slow, what to do, and how much it would save: rules over what was measured and recorded."""
