"""What MkDocs does for the links of Markdown, for those of the tutorial, which is a notebook."""

import posixpath
import re

from mkdocs.exceptions import PluginError


def on_page_content(html, page, config, files):
    """Point links to documents at their pages, and leave out those to results, which a run of the notebook writes."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    folder = posixpath.dirname(page.file.src_uri)

    def linked(match):
        document = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, match[1])))
        if document is None:
            raise PluginError(f"{page.file.src_uri} links to {match[1]}, which is no page")
        return f'href="{document.url_relative_to(page.file)}"'

    without_results = re.sub(r'<a href="\.\./results/[^"]*"[^>]*>(.*?)</a>', r"\1", html)
    return re.sub(r'href="([^":#]+\.md)"', linked, without_results)
