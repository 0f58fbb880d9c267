"""Questions about SQLite databases, answered with SQL: the agent, its databases, and the same agent in two frameworks.

shop_database.py    makes small databases, and questions with the queries that answer them
sql_reader.py       reads a database within bounds, and compares the rows of two queries
sql_task.py         the prompt of a question, and the score of an answer
text_to_sql.py      the agent; sql_langgraph.py and sql_agents_sdk.py are the same as programs
"""
