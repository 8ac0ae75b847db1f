"""Write the table and the JSON schema of all settings anew, from their models.

python -m workflow.scripts.write_settings_pages
"""

from workflow.lib.artifacts.settings_reference import write_all

if __name__ == "__main__":
    write_all()
