"""The update step that every stage uses, its optimisers, schedules and supervised losses."""
