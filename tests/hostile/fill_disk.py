# ends: error memory cpu
# ruff: noqa
for number in range(100_000):
    with open(f"file{number}", "wb") as file:
        file.write(b"x" * 2**20)
