"""Small SQLite databases of a shop, and questions about them with the queries that answer them."""

from __future__ import annotations

import functools
import os
import random
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

CITIES = ("Oslo", "Lima", "Kyoto", "Turin", "Quito", "Perth")
NAMES = ("Ada", "Ben", "Chloe", "Dario", "Elif", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kira", "Luis", "Mei", "Nils")
PRODUCTS = ("lamp", "desk", "chair", "shelf", "rug", "clock", "vase", "mirror")
SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, price INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers,
                     product_id INTEGER REFERENCES products, quantity INTEGER);
"""
QUESTIONS = (
    ("How many customers live in {city}?", "SELECT COUNT(*) FROM customers WHERE city = '{city}'"),
    ("What does a {product} cost?", "SELECT price FROM products WHERE name = '{product}'"),
    ("Which products cost more than {price}?", "SELECT name FROM products WHERE price > {price}"),
    ("In which city does {name} live?", "SELECT city FROM customers WHERE name = '{name}'"),
    (
        "How many units of the product {product} were ordered?",
        "SELECT COALESCE(SUM(quantity), 0) FROM orders JOIN products ON products.id = product_id"
        " WHERE name = '{product}'",
    ),
    (
        "Which customers ordered a {product}?",
        "SELECT DISTINCT customers.name FROM customers JOIN orders ON customer_id = customers.id"
        " JOIN products ON products.id = product_id WHERE products.name = '{product}'",
    ),
    (
        "How much did customers from {city} spend in total?",
        "SELECT COALESCE(SUM(price * quantity), 0) FROM orders JOIN customers ON customers.id = customer_id"
        " JOIN products ON products.id = product_id WHERE city = '{city}'",
    ),
    ("List all products, the most expensive one first.", "SELECT name FROM products ORDER BY price DESC, name"),
)
SEEDS = 200
"""Databases: those with the highest numbers, a tenth, are held out."""


@functools.cache
def shop(seed: int) -> Path:
    """The database with this number; it is made when it is first needed, in a folder for temporary files."""
    folder = Path(tempfile.gettempdir()) / f"agentrl-shops-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"shop-{seed}.sqlite"
    if not path.exists():
        draft = Path(tempfile.mkstemp(dir=folder)[1])
        _fill(draft, random.Random(f"shop-{seed}"))
        draft.rename(path)  # another process may have made the same one
    return path


def _fill(path: Path, rng: random.Random) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(SCHEMA)
        names = rng.sample(NAMES, 10)
        prices = rng.sample(range(5, 200), len(PRODUCTS))
        connection.executemany(
            "INSERT INTO customers (name, city) VALUES (?, ?)", [(n, rng.choice(CITIES)) for n in names]
        )
        connection.executemany("INSERT INTO products (name, price) VALUES (?, ?)", zip(PRODUCTS, prices, strict=True))
        orders = [(rng.randint(1, 10), rng.randint(1, len(PRODUCTS)), rng.randint(1, 9)) for _ in range(30)]
        connection.executemany("INSERT INTO orders (customer_id, product_id, quantity) VALUES (?, ?, ?)", orders)


def train_tasks(seed: int = 0, count: int = 4096) -> Iterator[dict[str, Any]]:
    """`count` random questions about databases that are not held out."""
    return _tasks(random.Random(f"train-{seed}"), range(SEEDS - SEEDS // 10), count)


def heldout_tasks() -> list[dict[str, Any]]:
    """64 fixed questions about held-out databases."""
    return list(_tasks(random.Random("held out"), range(SEEDS - SEEDS // 10, SEEDS), 64))


def _tasks(rng: random.Random, shops: range, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        question, query = rng.choice(QUESTIONS)
        words = {
            "city": rng.choice(CITIES),
            "product": rng.choice(PRODUCTS),
            "name": rng.choice(NAMES),
            "price": rng.randint(20, 150),
        }
        yield {"shop": rng.choice(shops), "question": question.format(**words), "query": query.format(**words)}
