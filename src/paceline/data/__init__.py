"""What runs are fed with: images to train on, and recorded speeds of workers."""
