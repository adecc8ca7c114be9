"""The APIs of the server: models of their bodies, translations into a `CompletionRequest`, and answers.

completions.py  OpenAI's completions and chat completions
responses.py    OpenAI's responses, and the conversations that they continue
messages.py     Anthropic's messages
ollama.py       Ollama's chats and completions, and its lists of models
embeddings.py   OpenAI's embeddings and Ollama's
"""
