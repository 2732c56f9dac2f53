"""The HTTP service: OpenAI's and Anthropic's interfaces in front of one engine."""
