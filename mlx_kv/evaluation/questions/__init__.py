"""Questions put to a language model about a long context: what is asked, in the words of a chat."""
