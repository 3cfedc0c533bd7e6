"""Model serving over HTTP: the OpenAI-compatible server and the chat page."""
