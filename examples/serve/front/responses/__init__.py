"""OpenAI's `/v1/responses`, over the same machinery as chats."""
