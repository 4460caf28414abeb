"""The agent loop: tools and the conversation that calls them."""
