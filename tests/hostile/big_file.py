# ends: error
# ruff: noqa
with open("file", "wb") as file:
    while True:
        file.write(b"x" * 2**20)
