"""From tasks to orders, and from orders to filled ones."""
