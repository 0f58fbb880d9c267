"""Model calls: the intent before sampling, the outcome before delivery, who received the answer, the conversation."""
