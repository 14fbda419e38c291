"""Producers: the batch plan, one worker process a target replica, and the hand-over to the training process."""
