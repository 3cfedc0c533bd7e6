"""A model behind HTTP: the OpenAI-compatible server and the chat page."""
