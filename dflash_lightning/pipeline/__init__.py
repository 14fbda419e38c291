"""What a run's profile says: windows, the verdict over them, and the planner that predicts other settings."""
