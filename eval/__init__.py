"""From a checkpoint to numbers and text: `python -m eval`."""
