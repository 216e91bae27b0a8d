"""A trial that computes for some two seconds, with one thread."""

from learnerkit import sweep

p = sweep.params(x=1.0)
total = 0
for i in range(30_000_000):
    total += i & 1
print(f"loss: {p.x**2 + total % 1}")
