"""Small real tasks, trained in minutes with every system on one budget: `make accuracy`."""
