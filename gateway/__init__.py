"""HTTP: health, and what people and programs reach the queue through. May import `app`, `tables` and `marq`."""
