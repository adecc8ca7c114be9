"""APIs besides OpenAI's chats and completions: each translates its requests into those of a chat, and answers back.

translation.py       what their requests have in common
blocks.py            an answer in the order of its parts: reasoning, texts, calls
response_requests.py, response_items.py, response_writer.py    OpenAI's responses
conversations.py     responses that a later request may go on from
message_requests.py, message_writer.py                         Anthropic's messages
"""
