"""From a plugin reference to an object that meets its contract.

registry      one run's plugins: references and names resolved, hooks asked
hookspecs     the hooks of pluggy plugins
reference     the forms of a reference; modules and names in the source, read without importing
locate        where a reference leads, and the import of what it names
shipping      the user's code on other nodes, both ends
signature     contracts of the kinds, checked against signatures and methods
calls         calls of plugins, and the errors about them
hooks         pluggy plugins: load, check, ask
import_names  packages that a plugin provides where they are not installed
old_names     where the modules of earlier versions are now
entry_points  names that installed distributions bring, and the rows of ``plugins list``
"""
