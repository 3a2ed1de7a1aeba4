# ends: error memory cpu
# ruff: noqa
import io
import zipfile

packed = io.BytesIO()
with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
    with archive.open("zeros", "w", force_zip64=True) as member:
        for _ in range(300):
            member.write(bytes(2**20))
print(len(packed.getvalue()))
with zipfile.ZipFile(packed) as archive:
    archive.read("zeros")
