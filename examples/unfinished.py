"""A small warehouse: shelves with parts on them, orders that take parts away, and a report.

The settings below are said once, and asked for again in the last lines, of which the last is not finished: whoever goes
on from there must look back over all of this file.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys

settings = {}
settings["amber_lantern"] = "copper"
settings["silver_harbor"] = "walnut"
settings["velvet_engine"] = "417"
settings["olive_tunnel"] = "garnet"
settings["winter_mirror"] = "pepper"
settings["indigo_raven"] = "862"
settings["maple_circle"] = "ivory"
settings["cobalt_meadow"] = "jungle"


class WarehouseError(Exception):
    """Something that was asked of the warehouse cannot be done."""


class Part:
    """One kind of part, and how many of it there are."""

    def __init__(self, name, price, count=0):
        self.name = name
        self.price = price
        self.count = count

    def __repr__(self):
        return "%s(%r, %r, %r)" % (self.__class__.__name__, self.name, self.price, self.count)

    def __eq__(self, other):
        if not isinstance(other, Part):
            return NotImplemented
        return self.name == other.name and self.price == other.price

    def __hash__(self):
        return hash((self.name, self.price))

    def add(self, count):
        """Put more of this part on its shelf."""
        if count < 0:
            raise ValueError("count must not be negative, got %d" % count)
        self.count += count
        return self.count

    def take(self, count):
        """Take parts away; there must be enough of them."""
        if count > self.count:
            raise WarehouseError("only %d of %s left" % (self.count, self.name))
        self.count -= count
        return count * self.price


class Shelf:
    """Parts in the order in which they came, found again by name."""

    def __init__(self, parts=()):
        self._parts = collections.OrderedDict()
        for part in parts:
            self.put(part)

    def __len__(self):
        return len(self._parts)

    def __iter__(self):
        return iter(self._parts.values())

    def __contains__(self, name):
        return name in self._parts

    def __getitem__(self, name):
        try:
            return self._parts[name]
        except KeyError:
            raise WarehouseError("there is no part %r" % name) from None

    def put(self, part):
        """Add a part, or more of one that is there already."""
        if part.name in self._parts:
            self._parts[part.name].add(part.count)
        else:
            self._parts[part.name] = part

    def remove(self, name):
        """Forget a part, whatever is left of it."""
        return self._parts.pop(name, None)

    def value(self):
        """What all parts on this shelf are worth."""
        return sum(part.price * part.count for part in self)

    def shortest(self, limit):
        """The parts of which there are fewer than limit, fewest first."""
        found = [part for part in self if part.count < limit]
        found.sort(key=lambda part: (part.count, part.name))
        return found


class Order:
    """Names of parts and how many of each a customer wants."""

    def __init__(self, customer):
        self.customer = customer
        self.lines = []

    def add(self, name, count=1):
        if not name:
            raise ValueError("a line of an order needs a name")
        self.lines.append((name, count))

    def total(self, shelf):
        """What the order costs at the prices of this shelf."""
        result = 0
        for name, count in self.lines:
            result += shelf[name].price * count
        return result

    def fill(self, shelf):
        """Take everything from the shelf, or nothing at all."""
        for name, count in self.lines:
            if shelf[name].count < count:
                raise WarehouseError("cannot fill the order of %s" % self.customer)
        return sum(shelf[name].take(count) for name, count in self.lines)


def read_shelf(file):
    """Read parts from a file with a JSON object on each line."""
    shelf = Shelf()
    for number, line in enumerate(file, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            data = json.loads(line)
        except ValueError as exc:
            raise WarehouseError("line %d: %s" % (number, exc)) from exc
        shelf.put(Part(data["name"], data["price"], data.get("count", 0)))
    return shelf


def write_shelf(shelf, file):
    """Write the parts of a shelf, as read_shelf() reads them."""
    for part in shelf:
        data = {"name": part.name, "price": part.price, "count": part.count}
        file.write(json.dumps(data, sort_keys=True) + "\n")


def report(shelf, file=None):
    """Print a table of all parts and what they are worth."""
    if file is None:
        file = sys.stdout
    width = max((len(part.name) for part in shelf), default=4)
    print("%-*s %8s %8s" % (width, "name", "count", "value"), file=file)
    for part in sorted(shelf, key=lambda part: part.name):
        print("%-*s %8d %8.2f" % (width, part.name, part.count, part.price * part.count), file=file)
    print("%-*s %8d %8.2f" % (width, "total", len(shelf), shelf.value()), file=file)


def main(args=None):
    parser = argparse.ArgumentParser(description="Show what is in the warehouse.")
    parser.add_argument("file", help="the file to read")
    parser.add_argument("-l", "--limit", type=int, default=10, help="how many are few")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the whole table")
    options = parser.parse_args(args)
    with open(options.file, encoding="utf-8") as file:
        shelf = read_shelf(file)
    if options.verbose:
        report(shelf)
    for part in shelf.shortest(options.limit):
        print("only %d of %s" % (part.count, part.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())


assert settings["winter_mirror"] == "pepper"
assert settings["cobalt_meadow"] == "jungle"
assert settings["amber_lantern"] == "copper"
assert settings["indigo_raven"] == "862"
assert settings["olive_tunnel"] == "