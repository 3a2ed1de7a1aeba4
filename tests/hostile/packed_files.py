# ends: error memory cpu
# ruff: noqa
# A small archive that fills the disk when it is unpacked.
import io
import zipfile

packed = io.BytesIO()
with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
    for number in range(64):
        archive.writestr(f"../../zeros{number}", bytes(2**20))
with zipfile.ZipFile(packed) as archive:
    archive.extractall()
