// Shows the report of a LeanDiT node inside the node, after it ran.
import { app } from "../../../scripts/app.js";

const WIDGET = "leandit_report";

function reportWidget(node) {
  const existing = node.widgets?.find((widget) => widget.name === WIDGET);
  if (existing) return existing;
  const area = document.createElement("textarea");
  area.readOnly = true;
  area.className = "comfy-multiline-input";
  area.style.fontFamily = "monospace";
  area.style.whiteSpace = "pre-wrap";
  area.setAttribute("aria-label", "LeanDiT report");
  const widget = node.addDOMWidget(WIDGET, "customtext", area, {
    getValue: () => area.value,
    setValue: (value) => {
      area.value = value ?? "";
    },
    getMinHeight: () => 160,
    serialize: false,
  });
  // Not part of the workflow: saved graphs and API prompts hold inputs only.
  widget.serialize = false;
  return widget;
}

app.registerExtension({
  name: "LeanDiT.report",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.name.startsWith("LeanDiT")) return;
    const onExecuted = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      if (!output?.leandit) return;
      const isNew = !this.widgets?.some((widget) => widget.name === WIDGET);
      reportWidget(this).value = output.text.join("\n");
      if (isNew) {
        const size = this.computeSize();
        this.setSize([Math.max(this.size[0], size[0]), Math.max(this.size[1], size[1])]);
      }
      this.setDirtyCanvas(true, true);
    };
  },
});
